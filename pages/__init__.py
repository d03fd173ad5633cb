"""What the documentation site shows and no file holds: gallery, drawings, output of commands."""
