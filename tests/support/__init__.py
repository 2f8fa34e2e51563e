"""What tests and scripts both need: tiny configurations, models that are tables, allocators and servers."""
