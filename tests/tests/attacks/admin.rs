//! The admin listener: who may read and change, and how long a connection may take.
