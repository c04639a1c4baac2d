"""One snapshot run: plan, journal, steps, and the way back."""
