"""Better schedules, transfer orders and settings, each beside a bound or an exhaustive twin."""
