//! Memory that one request can make the router hold, and processor time that it can take from
//! others.
