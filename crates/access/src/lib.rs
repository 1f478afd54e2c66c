//! Who may use the router: the credentials of clients, the tenants that they stand for, what a tenant
//! may use, and in whose cache its prompts are.
