"""Search, with a proof, for the number of layers per stage that makes the step shortest."""
