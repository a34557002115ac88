"""Search: propose, attempt and judge until nothing is left to try; then the final choice and the verdict."""
