"""Complete programs that show how Outrider is used."""
