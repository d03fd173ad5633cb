"""OptPipe (arXiv 2510.05186): schedules under a memory limit against the best there is."""
