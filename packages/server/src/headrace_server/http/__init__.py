"""HTTP below the routes: the connection, middleware, JSON bodies."""
