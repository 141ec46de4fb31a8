"""What is to be explained: pictures in folders, lists, archives and stores, as one list in an order of its own."""
