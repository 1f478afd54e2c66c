//! The inputs of the fuzz targets over what clients and operators send, as ordinary tests.
//! fuzz/README.md says how they came about.

#[path = "../../../fuzz/checks/attach.rs"]
mod attach;
#[path = "../../../fuzz/checks/chat_template.rs"]
mod chat_template;
#[path = "../../../fuzz/checks/client_body.rs"]
mod client_body;
#[path = "../../../fuzz/checks/config_yaml.rs"]
mod config_yaml;
#[path = "../../../fuzz/checks/engine_reply.rs"]
mod engine_reply;
#[path = "../../../fuzz/checks/engine_wire.rs"]
mod engine_wire;
#[path = "../../../fuzz/checks/form.rs"]
mod form;
#[path = "../../../fuzz/checks/grpc_call.rs"]
mod grpc_call;
#[path = "../../../fuzz/checks/ingress_wire.rs"]
mod ingress_wire;
#[path = "../../../fuzz/checks/replay.rs"]
mod replay;
#[path = "../../../fuzz/checks/sse.rs"]
mod sse;

#[test]
fn attach() {
    replay::replay("attach", attach::check);
}

#[test]
fn client_body() {
    replay::replay("client_body", client_body::check);
}

#[test]
fn form() {
    replay::replay("form", form::check);
}

#[test]
fn sse() {
    replay::replay("sse", sse::check);
}

#[test]
fn config_yaml() {
    replay::replay("config_yaml", config_yaml::check);
}

#[test]
fn chat_template() {
    replay::replay("chat_template", chat_template::check);
}

#[test]
fn engine_reply() {
    replay::replay("engine_reply", engine_reply::check);
}

#[test]
fn engine_wire() {
    replay::replay("engine_wire", engine_wire::check);
}

#[test]
fn ingress_wire() {
    replay::replay("ingress_wire", ingress_wire::check);
}

#[test]
fn grpc_call() {
    replay::replay("grpc_call", grpc_call::check);
}
