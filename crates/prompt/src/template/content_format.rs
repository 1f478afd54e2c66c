//! Detects which shape of message content a template expects, from its syntax tree, by the rules of
//! vLLM's `--chat-template-content-format auto` (`vllm/renderers/hf.py`, 0.32): a loop over a
//! message's content means parts, anything else means text. A guess by names or by a trial render
//! would be wrong for templates that support both.

use std::collections::HashSet;

use minijinja::Value;
use minijinja::machinery::ast::{Call, CallArg, Expr, Macro, Stmt};

use super::ContentFormat;

/// vLLM's algorithm asserts that assignment targets are plain names; a template that violates this
/// gets the default format.
struct OddTarget;

/// The content format of a parsed template.
pub(super) fn detect(root: &Stmt<'_>) -> ContentFormat {
    let mut nodes = Nodes::default();
    nodes.statement(root);
    match loops_over_content(&nodes) {
        Ok(true) => ContentFormat::OpenAi,
        Ok(false) | Err(OddTarget) => ContentFormat::String,
    }
}

fn loops_over_content(nodes: &Nodes<'_, '_>) -> Result<bool, OddTarget> {
    let messages = message_names(nodes)?;
    let is_content =
        |expr: &Expr<'_>| messages.iter().any(|name| is_access(expr, name, Some("content")));
    for (target, iter, owner) in &nodes.loops {
        let in_macro = owner.is_some();
        let through_macro = || {
            let Expr::Var(name) = iter else { return false };
            // The innermost macro around the loop decides.
            owner.is_some_and(|owner| {
                content_parameters(nodes, owner, &is_content).contains(name.id)
            })
        };
        let plain = || !in_macro && matches!(iter, Expr::Var(name) if name.id == "content");
        if is_content(iter) || through_macro() || plain() {
            name_of(target)?;
            return Ok(true);
        }
    }
    Ok(false)
}

/// Names that stand for one message: targets of loops over the messages, or over a variable that
/// was assigned from them.
fn message_names<'a>(nodes: &Nodes<'_, 'a>) -> Result<Vec<&'a str>, OddTarget> {
    let mut lists = vec!["messages"];
    let mut seen = HashSet::from(["messages"]);
    let mut next = 0;
    while let Some(list) = lists.get(next).copied() {
        next += 1;
        for (target, value) in &nodes.assignments {
            if is_access(value, list, None) {
                let name = name_of(target)?;
                if seen.insert(name) {
                    lists.push(name);
                }
            }
        }
    }
    let mut messages = Vec::new();
    for (target, iter, _) in &nodes.loops {
        if lists.iter().any(|list| is_access(iter, list, None)) {
            messages.push(name_of(target)?);
        }
    }
    Ok(messages)
}

/// Parameters of a macro to which some call passes a message's content.
fn content_parameters<'a>(
    nodes: &Nodes<'_, 'a>,
    owner: &Macro<'a>,
    is_content: &dyn Fn(&Expr<'_>) -> bool,
) -> HashSet<&'a str> {
    let parameters: Vec<&str> = owner.args.iter().filter_map(|arg| name_of(arg).ok()).collect();
    let mut found = HashSet::new();
    for call in &nodes.calls {
        if !matches!(&call.expr, Expr::Var(name) if name.id == owner.name) {
            continue;
        }
        let mut position = 0;
        for arg in &call.args {
            match arg {
                CallArg::Pos(value) => {
                    if let Some(name) = parameters.get(position)
                        && is_content(value)
                    {
                        found.insert(*name);
                    }
                    position += 1;
                }
                CallArg::Kwarg(name, value) => {
                    if let Some(name) = parameters.iter().find(|known| *known == name)
                        && is_content(value)
                    {
                        found.insert(*name);
                    }
                }
                CallArg::PosSplat(_) | CallArg::KwargSplat(_) => {}
            }
        }
    }
    found
}

fn name_of<'a>(expr: &Expr<'a>) -> Result<&'a str, OddTarget> {
    match expr {
        Expr::Var(name) => Ok(name.id),
        _ => Err(OddTarget),
    }
}

/// Whether an expression is `name`, or `name.key` or `name['key']`, ignoring filters, tests and
/// slices.
fn is_access(expr: &Expr<'_>, name: &str, key: Option<&str>) -> bool {
    let is_name = |expr: &Expr<'_>| matches!(expr, Expr::Var(var) if var.id == name);
    match (expr, key) {
        (Expr::Filter(filter), _) => {
            filter.expr.as_ref().is_some_and(|inner| is_access(inner, name, key))
        }
        (Expr::Test(test), _) => is_access(&test.expr, name, key),
        (Expr::Slice(slice), _) => is_access(&slice.expr, name, key),
        (Expr::GetAttr(attr), Some(key)) => attr.name == key && is_name(&attr.expr),
        (Expr::GetItem(item), Some(key)) => {
            is_name(&item.expr)
                && matches!(&item.subscript_expr, Expr::Const(value) if value.value == Value::from(key))
        }
        (expr, None) => is_name(expr),
        _ => false,
    }
}

/// A loop: its target, what it iterates over, and the macro that contains it.
type Loop<'t, 'a> = (&'t Expr<'a>, &'t Expr<'a>, Option<&'t Macro<'a>>);

/// The parts of a syntax tree that the rules examine.
#[derive(Default)]
struct Nodes<'t, 'a> {
    loops: Vec<Loop<'t, 'a>>,
    assignments: Vec<(&'t Expr<'a>, &'t Expr<'a>)>,
    calls: Vec<&'t Call<'a>>,
    owner: Option<&'t Macro<'a>>,
}

impl<'t, 'a> Nodes<'t, 'a> {
    fn statements(&mut self, body: &'t [Stmt<'a>]) {
        for statement in body {
            self.statement(statement);
        }
    }

    fn statement(&mut self, statement: &'t Stmt<'a>) {
        match statement {
            Stmt::Template(node) => self.statements(&node.children),
            Stmt::EmitExpr(node) => self.expression(&node.expr),
            Stmt::ForLoop(node) => {
                self.loops.push((&node.target, &node.iter, self.owner));
                self.expression(&node.iter);
                self.optional(node.filter_expr.as_ref());
                self.statements(&node.body);
                self.statements(&node.else_body);
            }
            Stmt::IfCond(node) => {
                self.expression(&node.expr);
                self.statements(&node.true_body);
                self.statements(&node.false_body);
            }
            Stmt::WithBlock(node) => {
                for (_, value) in &node.assignments {
                    self.expression(value);
                }
                self.statements(&node.body);
            }
            Stmt::Set(node) => {
                self.assignments.push((&node.target, &node.expr));
                self.expression(&node.expr);
            }
            Stmt::SetBlock(node) => {
                self.optional(node.filter.as_ref());
                self.statements(&node.body);
            }
            Stmt::AutoEscape(node) => self.statements(&node.body),
            Stmt::FilterBlock(node) => {
                self.expression(&node.filter);
                self.statements(&node.body);
            }
            Stmt::Block(node) => self.statements(&node.body),
            Stmt::Macro(node) => self.macro_body(node),
            Stmt::CallBlock(node) => {
                self.call(&node.call);
                self.statements(&node.macro_decl.body);
            }
            Stmt::Do(node) => self.call(&node.call),
            Stmt::EmitRaw(_)
            | Stmt::Import(_)
            | Stmt::FromImport(_)
            | Stmt::Extends(_)
            | Stmt::Include(_)
            | Stmt::Continue(_)
            | Stmt::Break(_) => {}
        }
    }

    fn macro_body(&mut self, node: &'t Macro<'a>) {
        let outer = self.owner.replace(node);
        self.statements(&node.body);
        self.owner = outer;
    }

    fn call(&mut self, call: &'t Call<'a>) {
        self.calls.push(call);
        self.expression(&call.expr);
        self.arguments(&call.args);
    }

    fn arguments(&mut self, args: &'t [CallArg<'a>]) {
        for arg in args {
            match arg {
                CallArg::Pos(value)
                | CallArg::Kwarg(_, value)
                | CallArg::PosSplat(value)
                | CallArg::KwargSplat(value) => self.expression(value),
            }
        }
    }

    fn optional(&mut self, expr: Option<&'t Expr<'a>>) {
        if let Some(expr) = expr {
            self.expression(expr);
        }
    }

    fn expressions(&mut self, exprs: &'t [Expr<'a>]) {
        for expr in exprs {
            self.expression(expr);
        }
    }

    /// Within expressions, only calls matter.
    fn expression(&mut self, expr: &'t Expr<'a>) {
        match expr {
            Expr::Call(node) => self.call(node),
            Expr::Var(_) | Expr::Const(_) => {}
            Expr::Slice(node) => {
                self.expression(&node.expr);
                self.optional(node.start.as_ref());
                self.optional(node.stop.as_ref());
                self.optional(node.step.as_ref());
            }
            Expr::UnaryOp(node) => self.expression(&node.expr),
            Expr::BinOp(node) => {
                self.expression(&node.left);
                self.expression(&node.right);
            }
            Expr::Compare(node) => {
                self.expression(&node.expr);
                for op in &node.ops {
                    self.expression(&op.expr);
                }
            }
            Expr::IfExpr(node) => {
                self.expression(&node.test_expr);
                self.expression(&node.true_expr);
                self.optional(node.false_expr.as_ref());
            }
            Expr::Filter(node) => {
                self.optional(node.expr.as_ref());
                self.arguments(&node.args);
            }
            Expr::Test(node) => {
                self.expression(&node.expr);
                self.arguments(&node.args);
            }
            Expr::GetAttr(node) => self.expression(&node.expr),
            Expr::GetItem(node) => {
                self.expression(&node.expr);
                self.expression(&node.subscript_expr);
            }
            Expr::List(node) => self.expressions(&node.items),
            Expr::Tuple(node) => self.expressions(&node.items),
            Expr::Map(node) => {
                self.expressions(&node.keys);
                self.expressions(&node.values);
            }
        }
    }
}
