//! One stream per router: who this is, what the engine holds, how busy it is.
