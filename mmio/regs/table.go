package regs

// rows is the table. A row a line: name, where, what it is, may a VM write it, and
// what that does. Offsets are those of envytools' description of NVC0.
func rows() []Register {
	const w, r = true, false
	one := func(id ID, name string, at uint32, c Class, write bool, doc string) Register {
		return Register{id, name, at, 1, 4, c, write, doc}
	}
	many := func(id ID, name string, at, count, stride uint32, c Class, write bool, doc string) Register {
		return Register{id, name, at, count, stride, c, write, doc}
	}
	return []Register{
		one(PMCID, "PMC_ID", 0x000000, Const, r, "which GPU it is"),
		one(PMCIntr, "PMC_INTR", 0x000100, Virtual, r, "bit 8: PFIFO, 12: PGRAPH; only interrupts of the VM's own channels"),
		one(PMCIntrEnable, "PMC_INTR_EN", 0x000140, Virtual, w, "0: the VM gets no interrupt"),
		one(PMCEnable, "PMC_ENABLE", 0x000200, Virtual, w, "kept and read back; it would reset everybody"),
		one(PMCSubfifoEnable, "PMC_SUBFIFO_EN", 0x000204, Virtual, w, "kept and read back"),
		one(Phase, "PHASE", 0x001480, Virtual, w, "of no hardware: labels the VM's counters (1 init, 2 copy, 3 launch, 4 close) and does nothing else"),
		one(Window, "PMEM_BASE", 0x001700, Relocate, w, "bits 0-23: base of the PRAMIN window in units of 64 KiB, within the partition; a target other than VRAM is refused"),
		one(BAR1Instance, "BAR1_INST", 0x001704, Scan, w, "the instance block of BAR1's tables, within the partition"),
		one(BAR3Instance, "BAR3_INST", 0x001714, Scan, w, "the instance block of BAR3's tables, within the partition"),
		one(PeepholeConfig, "PEEPHOLE_CFG", 0x001718, Deny, r, "would reach any memory"),
		one(PFIFOIntr, "PFIFO_INTR", 0x002100, Virtual, w, "bit 0: channel table error, 8: bad command, 28: VM fault, 30: playlist, 31: notify; write 1 to clear"),
		one(PFIFOIntrEnable, "PFIFO_INTR_EN", 0x002140, Virtual, w, "which of them count for PMC_INTR"),
		one(PFIFOControl, "PFIFO_CTRL", 0x002200, Virtual, w, "kept and read back; it would stop everybody"),
		one(PFIFOSubfifos, "PFIFO_SUBFIFOS", 0x002204, Virtual, w, "kept and read back"),
		many(PFIFOEngines, "PFIFO_ENGINE", 0x002208, 6, 4, Virtual, w, "kept and read back"),
		one(BAR1Base, "BAR1_BASE", 0x002254, Virtual, w, "bits 0-27: where in BAR1 the channels' USERD pages begin, in pages"),
		one(PlaylistAddress, "PLAYLIST_ADDR", 0x002270, Relocate, w, "the VM's playlist, in pages, within the partition"),
		one(PlaylistLength, "PLAYLIST_LEN", 0x002274, Trigger, w, "reads the VM's playlist, keeps what are valid channels of its own, and makes the hardware's list of all VMs' anew"),
		one(PlaylistStatus, "PLAYLIST_STATUS", 0x00227c, Virtual, r, "bit 20: busy; never"),
		one(FaultSource, "VM_FAULT_SOURCE", 0x00259c, Virtual, w, "units that have faulted for the VM; write 1 to clear"),
		one(EngineFault, "ENG_FAULT", 0x00262c, Deny, r, "would fault others' engines"),
		one(EngineFreeze, "ENG_FREEZE", 0x002630, Deny, r, "would stop everybody"),
		one(Kick, "KICK", 0x002634, Trigger, w, "takes one of the VM's channels off the GPU; reads back its number when that is done"),
		many(FaultInfo, "VM_FAULT", 0x002800, 128, 4, Virtual, r, "instance, address and reason of the VM's last fault in each of 32 units, in the VM's terms"),
		one(PlaylistIntr, "PLAYLIST_INTR", 0x002a00, Virtual, w, "bit 28: the list was read; write 1 to clear"),
		many(ChannelInstance, "CHAN_INST", 0x003000, 128, 8, Relocate, w, "bits 0-27: the channel's instance block, in pages, within the partition; 31: valid. The hardware gets a shadow of it"),
		many(ChannelState, "CHAN_STATE", 0x003004, 128, 8, Virtual, w, "bit 0: runnable, 12: loaded, 28: pending"),
		many(Bypass, "PFIFO_BYPASS", 0x005000, 1024, 4, Deny, r, "would give commands to others' channels"),
		one(TimeLow, "PTIMER_LOW", 0x009400, Virtual, r, "nanoseconds since the VM's GPU was made or reset"),
		one(TimeHigh, "PTIMER_HIGH", 0x009410, Virtual, r, "its upper half"),
		one(Units, "PUNITS_CONTROLLERS", 0x022438, Const, r, "1 memory controller"),
		many(Subfifo, "PSUBFIFO", 0x040000, 3*0x800, 4, Deny, r, "would change what a running channel fetches"),
		many(Peephole, "PEEPHOLE", 0x060000, 1024, 4, Deny, r, "would reach any memory"),
		one(Flush, "PFLUSH", 0x070000, Trigger, w, "stores are done when it reads with bit 1 clear: at once"),
		one(TLBStatus, "TLB_STATUS", 0x100c80, Virtual, r, "bit 15: done, 16-23: free slots; neither while tables are being read"),
		one(TLBSpace, "TLB_VSPACE", 0x100cb8, Latch, w, "the page directory that the next flush is for, in units of 256 bytes"),
		one(TLBTrigger, "TLB_TRIGGER", 0x100cbc, Scan, w, "bit 31: flush. The tables of each address space with that directory are read again: at once (eager) or before their next use (lazy)"),
		many(CopyEngines, "PCOPY", 0x104000, 0x800, 4, Deny, r, "copy engines are not shared"),
		many(Daemon, "PDAEMON", 0x10a000, 1024, 4, Deny, r, "firmware that rules the whole card"),
		one(MemorySize, "PBFB_MIB", 0x10f20c, Const, r, "MiB of the partition"),
		one(MemoryPart, "PBFB_PART_MIB", 0x11020c, Const, r, "MiB of its only controller"),
		one(Controllers, "PXBAR_CONTROLLERS", 0x121c74, Const, r, "1 memory controller"),
		one(GraphIntr, "PGRAPH_INTR", 0x400100, Virtual, w, "bit 4: illegal method or class of one of the VM's channels; write 1 to clear"),
		one(GraphTrap, "PGRAPH_TRAP", 0x400108, Virtual, w, "kept and read back"),
		many(GraphCommand, "PGRAPH_ICMD", 0x400200, 2, 4, Deny, r, "would change the state of whatever runs"),
		one(GraphStatus, "PGRAPH_STATUS", 0x400700, Virtual, r, "0: none of the VM's commands waits or runs"),
		one(ContextData, "CTXCTL_DATA", 0x409500, Latch, w, "bit 31: VRAM, 0-27: instance block in pages"),
		one(ContextCommand, "CTXCTL_CMD", 0x409504, Trigger, w, "3: bind that instance block, if it is one of the VM's valid channels; others are refused"),
		one(ContextStatus, "CTXCTL_STATUS", 0x409800, Virtual, r, "bit 0: the last command is done"),
		one(ContextCurrent, "CTXCTL_CURRENT", 0x409b00, Virtual, r, "the instance block that runs, if it is one of the VM's; else 0"),
		many(GPCBroadcast, "PGRAPH_GPC", 0x418000, 0x2000, 4, Deny, r, "changes all units at once; these hold addresses"),
		many(Display, "PDISPLAY", 0x610000, 0x400, 4, Deny, r, "there is no display"),
		many(Aperture, "PRAMIN", 0x700000, 0x40000, 4, Relocate, w, "1 MiB of the partition from PMEM_BASE on, in bytes"),
	}
}
