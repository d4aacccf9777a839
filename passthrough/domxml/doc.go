// Package domxml edits the XML of libvirt domains. It finds, adds, removes and replaces
// host devices and the guest channel, and checks whether a domain can have host devices.
//
// An edit changes only the bytes that it must change. Comments, white space, the order
// and quotes of attributes, and unknown elements stay as they are. A hook needs that,
// because its output replaces a domain; and so does an operator who compares the XML with
// his own. So the XML is never generated from a tree. The package finds tokens by offset,
// and inserts or removes pieces of text. After each edit, the XML is parsed again, by
// this package and by libvirt's own XML types. If that fails, the edit is refused, and
// the document stays as it was.
//
// XML comes from files, libvirt and other hosts. Its size and depth are limited, and a
// document type is not permitted.
//
// Package internal/virt calls libvirt, and passthrough/pci finds devices.
package domxml
