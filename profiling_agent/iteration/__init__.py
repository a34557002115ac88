"""Goal and journal -> the next plan, or why to stop."""
