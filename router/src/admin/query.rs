//! The query of a request to the admin listener.

use axum::extract::FromRequestParts;
use http::StatusCode;
use http::request::Parts;
use serde::de::DeserializeOwned;

use super::refusal::AdminError;

/// The query of a request's target, read as `T`. One that is not of this form is refused with an error
/// like all others.
pub(super) struct Query<T>(pub(super) T);

impl<S: Sync, T: DeserializeOwned> FromRequestParts<S> for Query<T> {
    type Rejection = AdminError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, AdminError> {
        match axum::extract::Query::try_from_uri(&parts.uri) {
            Ok(axum::extract::Query(query)) => Ok(Self(query)),
            Err(error) => {
                let message = error.body_text();
                Err(AdminError::new(StatusCode::BAD_REQUEST, "invalid_request", message))
            }
        }
    }
}
