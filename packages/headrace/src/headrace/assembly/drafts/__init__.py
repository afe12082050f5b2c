"""What guesses tokens for the model that is served: a smaller model, or a head."""
