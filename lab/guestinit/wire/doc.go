// Package wire is what package labtest and the init of the lab's guests say to
// each other over a PV channel: a line of JSON per request and per answer. The
// channel may lose lines, cut them and send back what was written to it, so an
// answer names its request, and whoever reads drops what is no message.
package wire
