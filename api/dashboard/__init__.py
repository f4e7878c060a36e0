"""The dashboard: hand-written pages and ES modules, and the routes by which the API process serves them."""
