//! An XML document as a tree that owns its texts.

use roxmltree::{Document, Node};

use super::error::IrErrorKind;
use crate::ir::xml::escape;

/// How deep elements may nest: bodies of loops within bodies need a few levels each.
const MAX_DEPTH: usize = 64;

/// An element with everything in it.
#[derive(Clone, Debug)]
pub(super) struct Element {
    pub(super) tag: String,
    pub(super) attributes: Vec<(String, String)>,
    /// Text between the tags, without that around it.
    pub(super) text: String,
    pub(super) children: Vec<Element>,
}

impl Element {
    /// Parses a document. Entities that expand each other are refused by the library.
    ///
    /// # Errors
    /// [`IrErrorKind::Xml`], or [`IrErrorKind::Malformed`] for too deep a document.
    pub(super) fn parse(xml: &str) -> Result<Self, IrErrorKind> {
        let document = Document::parse(xml).map_err(|source| IrErrorKind::Xml { source })?;
        Self::from_node(document.root_element(), 0)
    }

    fn from_node(node: Node<'_, '_>, depth: usize) -> Result<Self, IrErrorKind> {
        let tag = node.tag_name().name().to_owned();
        if depth > MAX_DEPTH {
            let place = format!("element <{tag}>");
            return Err(IrErrorKind::Malformed { place, problem: "is nested too deep" });
        }
        let attribute = |found: roxmltree::Attribute<'_, '_>| {
            (found.name().to_owned(), found.value().to_owned())
        };
        let children = node.children().filter(Node::is_element);
        Ok(Self {
            tag,
            attributes: node.attributes().map(attribute).collect(),
            text: node.text().unwrap_or_default().trim().to_owned(),
            children: children
                .map(|child| Self::from_node(child, depth + 1))
                .collect::<Result<_, _>>()?,
        })
    }

    /// The value of an attribute.
    pub(super) fn attribute(&self, name: &str) -> Option<&str> {
        self.attributes.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// The first child with this tag.
    pub(super) fn child(&self, tag: &str) -> Option<&Self> {
        self.children.iter().find(|child| child.tag == tag)
    }

    /// The children with this tag.
    pub(super) fn children_named<'a>(&'a self, tag: &'a str) -> impl Iterator<Item = &'a Self> {
        self.children.iter().filter(move |child| child.tag == tag)
    }

    /// Calls `visit` for the data of every constant below this element: a loop has a body.
    ///
    /// # Errors
    /// What `visit` returns.
    pub(super) fn visit_constants<E>(
        &mut self,
        visit: &mut dyn FnMut(&mut Self) -> Result<(), E>,
    ) -> Result<(), E> {
        let is_constant = self.tag == "layer" && self.attribute("type") == Some("Const");
        for child in &mut self.children {
            if is_constant && child.tag == "data" {
                visit(child)?;
            } else {
                child.visit_constants(visit)?;
            }
        }
        Ok(())
    }

    /// Sets the value of an attribute that is there.
    pub(super) fn set(&mut self, name: &str, value: String) {
        if let Some((_, old)) = self.attributes.iter_mut().find(|(key, _)| key == name) {
            *old = value;
        }
    }

    /// Appends the element as XML.
    pub(super) fn render(&self, out: &mut String) {
        let Self { tag, attributes, text, children } = self;
        out.push_str(&format!("<{tag}"));
        for (key, value) in attributes {
            out.push_str(&format!(" {key}=\"{}\"", escape(value)));
        }
        if text.is_empty() && children.is_empty() {
            out.push_str("/>");
            return;
        }
        out.push('>');
        out.push_str(&escape(text));
        children.iter().for_each(|child| child.render(out));
        out.push_str(&format!("</{tag}>"));
    }
}
