"""Systems (machines): their numbers by name, read from files, and roofline times of ops."""
