"""Pages that the documentation site shows and no file holds: gallery, drawings, command output."""
