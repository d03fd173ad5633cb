"""Tables in the forms that runtimes of JAX take."""
