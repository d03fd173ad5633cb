"""Tables beside each other: metrics, published closed forms, cells that differ."""
