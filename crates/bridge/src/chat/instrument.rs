//! Rewrites a parsed template so that its values are measured (see [`super::budget`]).
//!
//! The result of every operator, filter, call, slice and literal goes through the filter [`BOUNDED`], and so does every
//! variable that is printed or handed to one of these. Plain lookups (`messages[0].role`) are free.

use minijinja::machinery::Span;
use minijinja::machinery::ast::{
    BinOp, BinOpKind, Call, CallArg, CallBlock, Compare, CompareOp, Const, Do, EmitExpr, Expr, Filter,
    FilterBlock, ForLoop, GetAttr, GetItem, IfCond, IfExpr, List, Macro, Map, Set, SetBlock, Spanned, Stmt,
    Template, Test, Tuple, UnaryOp, UnaryOpKind, Var, WithBlock,
};
use minijinja::value::Value;

/// Measures a value.
pub(super) const BOUNDED: &str = "__bounded";
/// Measures a string whose characters are counted.
pub(super) const INDEXED: &str = "__indexed";
/// Measures what a loop reads.
pub(super) const ITERATED: &str = "__iterated";
/// Repeats a string or list, or multiplies.
pub(super) const TIMES: &str = "__times";
/// Takes `start`, `stop` and `step` of a slice; `none` where one is not given.
pub(super) const SLICED: &str = "__sliced";

/// Filters that look at a value without reading or copying all of it.
const SHALLOW_FILTERS: &[&str] = &["length", "count", "first", "last", "default", "d"];
/// Tests that do so.
const SHALLOW_TESTS: &[&str] = &[
    "defined",
    "undefined",
    "none",
    "boolean",
    "true",
    "false",
    "number",
    "integer",
    "int",
    "float",
    "string",
    "sequence",
    "iterable",
    "mapping",
    "safe",
    "escaped",
    "odd",
    "even",
];

type Result<T> = std::result::Result<T, String>;

/// The template with every value measured, or what in it is not supported.
pub(super) fn instrument<'a>(stmt: &Stmt<'a>) -> Result<Stmt<'a>> {
    Ok(match stmt {
        Stmt::Template(s) => Stmt::Template(Spanned::new(Template { children: all(&s.children)? }, s.span())),
        Stmt::EmitExpr(s) => {
            let expr = match &s.expr {
                Expr::Const(c) => wrap(Expr::Const(Spanned::new(Const { value: c.value.clone() }, c.span()))),
                expr => operand(expr)?,
            };
            Stmt::EmitExpr(Spanned::new(EmitExpr { expr }, s.span()))
        }
        Stmt::EmitRaw(s) => {
            let text =
                Expr::Const(Spanned::new(Const { value: Value::from_safe_string(s.raw.into()) }, s.span()));
            Stmt::EmitExpr(Spanned::new(EmitExpr { expr: wrap(text) }, s.span()))
        }
        Stmt::ForLoop(s) => {
            let (target, iter) = (target(&s.target)?, filter(ITERATED, value(&s.iter)?));
            let filter_expr = s.filter_expr.as_ref().map(value).transpose()?;
            let (body, else_body) = (all(&s.body)?, all(&s.else_body)?);
            let new = ForLoop { target, iter, filter_expr, recursive: s.recursive, body, else_body };
            Stmt::ForLoop(Spanned::new(new, s.span()))
        }
        Stmt::IfCond(s) => {
            let (true_body, false_body) = (all(&s.true_body)?, all(&s.false_body)?);
            Stmt::IfCond(Spanned::new(IfCond { expr: value(&s.expr)?, true_body, false_body }, s.span()))
        }
        Stmt::WithBlock(s) => {
            let pair = |(t, e): &(Expr<'a>, Expr<'a>)| Ok((target(t)?, value(e)?));
            let assignments = s.assignments.iter().map(pair).collect::<Result<_>>()?;
            Stmt::WithBlock(Spanned::new(WithBlock { assignments, body: all(&s.body)? }, s.span()))
        }
        Stmt::Set(s) => {
            // Namespaces that hold each other could nest without end.
            let expr = if matches!(s.target, Expr::GetAttr(_)) { operand(&s.expr)? } else { value(&s.expr)? };
            Stmt::Set(Spanned::new(Set { target: target(&s.target)?, expr }, s.span()))
        }
        Stmt::SetBlock(s) => {
            let filter = s.filter.as_ref().map(value).transpose()?;
            let new = SetBlock { target: target(&s.target)?, filter, body: all(&s.body)? };
            Stmt::SetBlock(Spanned::new(new, s.span()))
        }
        Stmt::FilterBlock(s) => {
            let new = FilterBlock { filter: value(&s.filter)?, body: all(&s.body)? };
            Stmt::FilterBlock(Spanned::new(new, s.span()))
        }
        Stmt::Macro(s) => Stmt::Macro(declaration(s)?),
        Stmt::CallBlock(s) => {
            let new = CallBlock { call: call(&s.call)?, macro_decl: declaration(&s.macro_decl)? };
            Stmt::CallBlock(Spanned::new(new, s.span()))
        }
        Stmt::Continue(s) => Stmt::Continue(Spanned::new(minijinja::machinery::ast::Continue, s.span())),
        Stmt::Break(s) => Stmt::Break(Spanned::new(minijinja::machinery::ast::Break, s.span())),
        Stmt::Do(s) => Stmt::Do(Spanned::new(Do { call: call(&s.call)? }, s.span())),
        // One template is all there is, and its output is not HTML.
        Stmt::AutoEscape(_) => return Err("it uses autoescape, which no chat template needs".into()),
        _ => {
            return Err(
                "it refers to other templates or blocks of them, but a chat template stands alone".into()
            );
        }
    })
}

fn all<'a>(stmts: &[Stmt<'a>]) -> Result<Vec<Stmt<'a>>> {
    stmts.iter().map(instrument).collect()
}

fn wrap(expr: Expr<'_>) -> Expr<'_> {
    filter(BOUNDED, expr)
}

fn filter<'a>(name: &'static str, expr: Expr<'a>) -> Expr<'a> {
    let span = expr.span();
    Expr::Filter(Spanned::new(Filter { name, expr: Some(expr), args: Vec::new() }, span))
}

/// An expression whose value is printed, or handed to an operator, filter or function.
fn operand<'a>(expr: &Expr<'a>) -> Result<Expr<'a>> {
    let new = value(expr)?;
    Ok(match expr {
        Expr::Var(_) | Expr::GetAttr(_) | Expr::GetItem(_) | Expr::IfExpr(_) => wrap(new),
        Expr::BinOp(b) if matches!(b.op, BinOpKind::ScAnd | BinOpKind::ScOr) => wrap(new),
        Expr::Filter(f) if SHALLOW_FILTERS.contains(&f.name) => wrap(new),
        _ => new,
    })
}

/// An expression; what it makes is measured, what it only looks up is not.
fn value<'a>(expr: &Expr<'a>) -> Result<Expr<'a>> {
    let span = expr.span();
    Ok(match expr {
        Expr::Var(v) => Expr::Var(Spanned::new(Var { id: v.id }, span)),
        Expr::Const(c) => Expr::Const(Spanned::new(Const { value: c.value.clone() }, span)),
        Expr::Slice(s) => {
            let none = || Expr::Const(Spanned::new(Const { value: Value::from(()) }, span));
            let bound = |e: &Option<Expr<'a>>| -> Result<CallArg<'a>> {
                Ok(CallArg::Pos(e.as_ref().map(operand).transpose()?.unwrap_or_else(none)))
            };
            let args = vec![bound(&s.start)?, bound(&s.stop)?, bound(&s.step)?];
            let new = Filter { name: SLICED, expr: Some(operand(&s.expr)?), args };
            wrap(Expr::Filter(Spanned::new(new, span)))
        }
        Expr::UnaryOp(u) => {
            let not = matches!(u.op, UnaryOpKind::Not);
            let op = if not { UnaryOpKind::Not } else { UnaryOpKind::Neg };
            Expr::UnaryOp(Spanned::new(UnaryOp { op, expr: value(&u.expr)? }, span))
        }
        Expr::BinOp(b) => binary(b, span)?,
        Expr::Compare(c) => {
            let op = |o: &CompareOp<'a>| Ok(CompareOp { op: o.op, expr: operand(&o.expr)? });
            let ops = c.ops.iter().map(op).collect::<Result<_>>()?;
            Expr::Compare(Spanned::new(Compare { expr: operand(&c.expr)?, ops }, span))
        }
        Expr::IfExpr(i) => {
            let (test_expr, true_expr) = (value(&i.test_expr)?, value(&i.true_expr)?);
            let false_expr = i.false_expr.as_ref().map(value).transpose()?;
            Expr::IfExpr(Spanned::new(IfExpr { test_expr, true_expr, false_expr }, span))
        }
        Expr::Filter(f) => {
            let shallow = SHALLOW_FILTERS.contains(&f.name);
            let receiver = |e| if shallow { Ok(filter(INDEXED, value(e)?)) } else { operand(e) };
            let expr = f.expr.as_ref().map(receiver).transpose()?;
            let new =
                Expr::Filter(Spanned::new(Filter { name: f.name, expr, args: arguments(&f.args)? }, span));
            if shallow { new } else { wrap(new) }
        }
        Expr::Test(t) => {
            let receiver = if SHALLOW_TESTS.contains(&t.name) { value } else { operand };
            let (expr, args) = (receiver(&t.expr)?, arguments(&t.args)?);
            Expr::Test(Spanned::new(Test { name: t.name, expr, args }, span))
        }
        Expr::GetAttr(g) => {
            Expr::GetAttr(Spanned::new(GetAttr { expr: value(&g.expr)?, name: g.name }, span))
        }
        Expr::GetItem(g) => {
            let (expr, subscript_expr) = (filter(INDEXED, value(&g.expr)?), operand(&g.subscript_expr)?);
            Expr::GetItem(Spanned::new(GetItem { expr, subscript_expr }, span))
        }
        Expr::Call(c) => wrap(Expr::Call(call(c)?)),
        Expr::List(l) => wrap(Expr::List(Spanned::new(List { items: operands(&l.items)? }, span))),
        Expr::Tuple(t) => wrap(Expr::Tuple(Spanned::new(Tuple { items: operands(&t.items)? }, span))),
        Expr::Map(m) => {
            let (keys, values) = (operands(&m.keys)?, operands(&m.values)?);
            wrap(Expr::Map(Spanned::new(Map { keys, values }, span)))
        }
    })
}

fn operands<'a>(exprs: &[Expr<'a>]) -> Result<Vec<Expr<'a>>> {
    exprs.iter().map(operand).collect()
}

fn binary<'a>(b: &BinOp<'a>, span: Span) -> Result<Expr<'a>> {
    let rebuilt = |left, right| Expr::BinOp(Spanned::new(BinOp { op: b.op, left, right }, span));
    Ok(match b.op {
        // These return one of the two as it is.
        BinOpKind::ScAnd | BinOpKind::ScOr => rebuilt(value(&b.left)?, value(&b.right)?),
        // The only operator whose result may be much larger than both operands.
        BinOpKind::Mul => {
            let args = vec![CallArg::Pos(operand(&b.right)?)];
            let new = Filter { name: TIMES, expr: Some(operand(&b.left)?), args };
            wrap(Expr::Filter(Spanned::new(new, span)))
        }
        _ => wrap(rebuilt(operand(&b.left)?, operand(&b.right)?)),
    })
}

fn arguments<'a>(args: &[CallArg<'a>]) -> Result<Vec<CallArg<'a>>> {
    let one = |arg: &CallArg<'a>| {
        Ok(match arg {
            CallArg::Pos(e) => CallArg::Pos(operand(e)?),
            CallArg::Kwarg(name, e) => CallArg::Kwarg(name, operand(e)?),
            CallArg::PosSplat(e) => CallArg::PosSplat(operand(e)?),
            CallArg::KwargSplat(e) => CallArg::KwargSplat(operand(e)?),
        })
    };
    args.iter().map(one).collect()
}

/// A call of a function by its name, of a method, or of a value.
fn call<'a>(c: &Spanned<Call<'a>>) -> Result<Spanned<Call<'a>>> {
    let expr = match &c.expr {
        Expr::GetAttr(g) => {
            if matches!(&g.expr, Expr::Var(v) if v.id == "self") {
                return Err("it calls a block of a template, but a chat template has none".into());
            }
            let new = GetAttr { expr: operand(&g.expr)?, name: g.name };
            Expr::GetAttr(Spanned::new(new, g.span()))
        }
        other => value(other)?,
    };
    Ok(Spanned::new(Call { expr, args: arguments(&c.args)? }, c.span()))
}

fn declaration<'a>(m: &Spanned<Macro<'a>>) -> Result<Spanned<Macro<'a>>> {
    let args = m.args.iter().map(target).collect::<Result<_>>()?;
    let defaults = m.defaults.iter().map(value).collect::<Result<_>>()?;
    Ok(Spanned::new(Macro { name: m.name, args, defaults, body: all(&m.body)? }, m.span()))
}

/// Names that are assigned to.
fn target<'a>(expr: &Expr<'a>) -> Result<Expr<'a>> {
    let several = |items: &[Expr<'a>]| items.iter().map(target).collect::<Result<Vec<_>>>();
    Ok(match expr {
        Expr::List(l) => Expr::List(Spanned::new(List { items: several(&l.items)? }, l.span())),
        Expr::Tuple(t) => Expr::Tuple(Spanned::new(Tuple { items: several(&t.items)? }, t.span())),
        other => value(other)?,
    })
}
