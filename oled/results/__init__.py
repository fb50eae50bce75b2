"""Tables of results, and a page that shows them."""
