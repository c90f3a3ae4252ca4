"""What every sandbox promises, tested once for all kinds."""
