"""`python -m examples.fastapi_shop`."""

from examples.fastapi_shop.run import main

if __name__ == "__main__":
    main()
