"""The checker that executes the annotations of pipejax while the tests run."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # a whole number is a float too
