"""PPO for language models, assembled from the Drivetrain libraries: one node, many nodes, ROCm."""
