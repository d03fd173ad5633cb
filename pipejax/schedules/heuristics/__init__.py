"""How an order is found where only placement, times and limits are given."""
