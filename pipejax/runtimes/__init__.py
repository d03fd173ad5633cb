"""Tables run by runtimes that train, and written in the forms that runtimes read."""
