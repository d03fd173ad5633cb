"""Shared by all papers: schedules by label, claims and verdicts, journals, commands."""
