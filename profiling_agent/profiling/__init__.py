"""Model -> where its time, memory and parameters are."""
