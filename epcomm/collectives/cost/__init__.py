"""What plans cost before they are made, and which one to make."""
