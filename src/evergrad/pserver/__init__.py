"""The role that holds parameters and updates them."""
