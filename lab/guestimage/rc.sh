#!/bin/sh
# /etc/lab.rc: start what systemd starts in a real VM, and start it again when it
# ends, as its unit says. Sessions are gpuguest's children and outlive it.
mkdir -p /run/gpuctl-guest
chmod 755 /run/gpuctl-guest
# The unit has StateDirectory=gpuguest.
mkdir -p /var/lib/gpuguest
# lab.cuda=VENDOR:DEVICE,MIB: that card is one of NVIDIA's, too, by the fake of their driver.
for word in $(cat /proc/cmdline); do
	case $word in lab.cuda=*)
		card=${word#lab.cuda=}
		export GPUCTL_FAKE_CUDA=/run/fakecuda GPUCTL_DRIVER_NODES=/run/fakecuda/dev LD_LIBRARY_PATH=/usr/lib/fakecuda
		mkdir -p /etc/gpuctl/profiles.d /etc/ld.so.conf.d
		echo /usr/lib/fakecuda >/etc/ld.so.conf.d/fakecuda.conf # where gpuguest looks for what is installed
		cat >/etc/gpuctl/profiles.d/fakecuda.yaml <<-END
			version: 1
			profiles:
			  - name: emulated-cuda
			    match: ["${card%,*}"]
			    libraries: [libpocl.so.2]
			    env: {POCL_DEVICES: basic, POCL_MEMORY_LIMIT: "1"}
			    device: 0
			    cuda: true
		END
		/usr/local/bin/fakecard "${card%,*}" "${card#*,}" /run/gpuctl-guest/released.json >/var/log/fakecard.log 2>&1 &
		;;
	esac
done
while :; do
	/usr/bin/gpuguest serve --vm --config /etc/gpuctl/gpuguest.yaml >>/var/log/gpuguest.log 2>&1 &
	echo $! >/run/gpuguest.pid
	wait $!
	echo "gpuguest ended with $?" >>/var/log/gpuguest.log
	sleep 1
done
