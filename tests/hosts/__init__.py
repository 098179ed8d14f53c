"""Three hosts in network namespaces that follow docs/install.md: `make deploy-hosts`."""
