"""The explorer: a page on which a run can be looked at, and priced anew, without a server."""
