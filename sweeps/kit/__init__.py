"""What all papers share: schedules by label, claims and verdicts, journals, commands."""
