"""The thread of the clients' event loop, and the futures that other threads wait for."""
