"""Orders over four services, as a saga: shop, stock, payment and shipping talk through the broker only."""
