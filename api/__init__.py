"""The front door: HTTP routes, wire schemas, authentication, streams, dashboard, client and command line."""
