//! What a request's fields can reach: fields that steer an engine, and cache salts.
