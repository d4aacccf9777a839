package replica

// SmallFS is a folder of its own file system, of a size as mount(8) has it.
var SmallFS = small
