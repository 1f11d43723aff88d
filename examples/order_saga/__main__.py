"""`python -m examples.order_saga`."""

from examples.order_saga.run import main

if __name__ == "__main__":
    main()
