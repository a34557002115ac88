"""Language model: typed questions, validated answers, and the transcript that replays them."""
