"""Calibration: parameters of a system fitted to measured step times, with their uncertainty."""
