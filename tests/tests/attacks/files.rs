//! Files that the router writes, and the deployment examples.
