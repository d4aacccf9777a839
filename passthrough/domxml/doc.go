// Package domxml edits the XML of libvirt domains: host devices and the guest
// channel are found, added, removed and replaced, and whether a domain can have
// host devices at all is checked, with what to do about it.
//
// An edit changes the bytes it has to and no others. Comments, white space, the
// order and quotes of attributes, elements that this package or libvirt's
// schema never heard of: all stays as it was. That is what a hook needs, whose
// output replaces a domain, and an operator, who compares what he wrote with
// what he has. So the XML is never built anew from a tree; its tokens are found
// by offset and pieces are put in or taken out. After each edit it is parsed
// again, by this package and by libvirt's own XML types; an edit that would not
// parse is refused, and the document stays as it was.
//
// XML comes from files, libvirt and other hosts. It is limited in size and
// depth, and has no document type.
//
// Talking to libvirt is internal/virt's, finding devices passthrough/pci's.
package domxml
