"""From integers and seconds to finish times."""
