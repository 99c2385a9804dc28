#!/usr/bin/env bash
# A Slurm cluster of several nodes on one machine, all on loopback, without systemd, cgroups or GPUs. Debian 12, root.
#   tests/commands/slurm_cluster.sh install                    the packages of Debian
#   tests/commands/slurm_cluster.sh start [--no-accounting]    start what does not run
#   eval "$(tests/commands/slurm_cluster.sh env)"              SLURM_CONF for sbatch, squeue and so on in this shell
#   tests/commands/slurm_cluster.sh stop | status | wipe       stop what it started; show it; stop it and delete its folder
# SLURM_LOCAL: its folder. NODES, CPUS, MEM_MB, GPUS: what the nodes pretend to have.
set -euo pipefail
BASE=${SLURM_LOCAL:-${TMPDIR:-/tmp}/slurm_local} NODES=${NODES:-2} CPUS=${CPUS:-4} MEM_MB=${MEM_MB:-65536} GPUS=${GPUS:-2}
export SLURM_CONF=$BASE/etc/slurm.conf
PIDS="munged mariadbd slurmdbd slurmctld"; for i in $(seq "$NODES"); do PIDS="$PIDS slurmd.n$i"; done

alive() { local f=$BASE/run/$1.pid; [ -s "$f" ] && kill -0 "$(cat "$f")" 2>/dev/null && grep -q "^${1%%.*}" "/proc/$(cat "$f")/comm"; }
await() { local what=$1 seconds=$2; shift 2; local end=$((SECONDS + seconds)); while [ $SECONDS -lt $end ]; do timeout 10 "$@" >/dev/null 2>&1 && return; sleep 0.2; done; echo "slurm_cluster: $what did not come up; see $BASE/log" >&2; exit 1; }

install() {
  local want=""
  command -v slurmctld >/dev/null || want="slurm-wlm munge"
  if [ "$ACCOUNTING" = 1 ]; then command -v slurmdbd >/dev/null && command -v mariadbd >/dev/null || want="$want slurmdbd mariadb-server"; fi
  [ -z "$want" ] || { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $want >/dev/null; }
}

configure() {
  local host; host=$(hostname -s)
  mkdir -p "$BASE"/{etc,run,log,state,db,spool}; chmod 755 "$BASE" "$BASE"/*
  [ -s "$BASE/etc/munge.key" ] || { dd if=/dev/urandom of="$BASE/etc/munge.key" bs=1k count=1 status=none; chmod 400 "$BASE/etc/munge.key"; }
  local acct="AccountingStorageType=accounting_storage/none"
  [ "$ACCOUNTING" = 0 ] || acct="AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=16819
AccountingStoragePass=$BASE/run/munge.socket
AccountingStorageTRES=gres/gpu"
  local nodes="" i
  for i in $(seq "$NODES"); do
    nodes+="NodeName=n$i NodeHostname=$host NodeAddr=127.0.0.1 Port=$((17000 + i)) CPUs=$CPUS RealMemory=$MEM_MB Gres=gpu:$GPUS State=UNKNOWN"$'\n'
    local g; for g in $(seq 0 $((GPUS - 1))); do touch "$BASE/run/gpu$g"; done
  done
  echo "Name=gpu File=$BASE/run/gpu[0-$((GPUS - 1))]" >"$BASE/etc/gres.conf"
  cat >"$SLURM_CONF" <<CONF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$BASE/run/munge.socket,cred_expire=10
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmctldPort=16817
StateSaveLocation=$BASE/state
SlurmdSpoolDir=$BASE/spool/%n
SlurmctldPidFile=$BASE/run/slurmctld.pid
SlurmdPidFile=$BASE/run/slurmd.%n.pid
SlurmctldLogFile=$BASE/log/slurmctld.log
SlurmdLogFile=$BASE/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
MpiDefault=none
JobRequeue=1
OverTimeLimit=0
KillWait=${KILL_WAIT:-10}
MessageTimeout=60
SlurmdTimeout=${SLURMD_TIMEOUT:-60}
ReturnToService=2
InactiveLimit=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=5,bf_interval=5
PriorityType=priority/basic
$acct
${nodes}PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=10 PreemptMode=REQUEUE GraceTime=${GRACE:-15}
PartitionName=short Nodes=ALL MaxTime=00:10:00 PriorityTier=10 PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=20 PreemptMode=OFF
CONF
  cat >"$BASE/etc/slurmdbd.conf" <<CONF
AuthType=auth/munge
AuthInfo=socket=$BASE/run/munge.socket
DbdHost=127.0.0.1
DbdAddr=127.0.0.1
DbdPort=16819
SlurmUser=root
PidFile=$BASE/run/slurmdbd.pid
LogFile=$BASE/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=16820
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct
CONF
  sed -i "s/^DbdHost=.*/DbdHost=$host/" "$BASE/etc/slurmdbd.conf"; chmod 600 "$BASE/etc/slurmdbd.conf"
}

sql() { mariadb --no-defaults --socket="$BASE/run/mysql.sock" -u root "$@"; }

start() {
  ACCOUNTING=1; [ "${1:-}" != --no-accounting ] || ACCOUNTING=0
  configure
  alive munged || setsid munged --num-threads=4 --key-file="$BASE/etc/munge.key" --socket="$BASE/run/munge.socket" --pid-file="$BASE/run/munged.pid" \
    --log-file="$BASE/log/munged.log" --seed-file="$BASE/run/munged.seed"
  if [ "$ACCOUNTING" = 1 ]; then
    [ -d "$BASE/db/mysql" ] || mariadb-install-db --no-defaults --user=root --datadir="$BASE/db" --skip-test-db >"$BASE/log/install-db.log" 2>&1
    alive mariadbd || (setsid mariadbd --no-defaults --user=root --datadir="$BASE/db" --socket="$BASE/run/mysql.sock" --bind-address=127.0.0.1 --port=16820 \
      --pid-file="$BASE/run/mariadbd.pid" --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 >"$BASE/log/mariadbd.log" 2>&1 </dev/null &)
    await mariadbd 60 mariadb --no-defaults --socket="$BASE/run/mysql.sock" -u root -e "select 1"
    sql -e "create user if not exists 'slurm'@'127.0.0.1' identified by 'slurm'; create user if not exists 'slurm'@'localhost' identified by 'slurm';
            grant all on slurm_acct.* to 'slurm'@'127.0.0.1'; grant all on slurm_acct.* to 'slurm'@'localhost'"
    alive slurmdbd || setsid slurmdbd
    await slurmdbd 60 sacctmgr -n list cluster
    sacctmgr -n list cluster | grep -q local || sacctmgr -i -Q add cluster local >/dev/null
    sacctmgr -n list account | grep -qw lab || { sacctmgr -i -Q add account lab >/dev/null; sacctmgr -i -Q add user root account=lab >/dev/null; }
  fi
  alive slurmctld || setsid slurmctld
  await slurmctld 60 scontrol ping
  local i; for i in $(seq "$NODES"); do alive "slurmd.n$i" || setsid slurmd -n "${SLURMD_NICE:-5}" -N "n$i"; done
  await "nodes" 60 sh -c "sinfo -h -o %T | grep -q idle && ! sinfo -h -o %T | grep -qE 'unk|down'"
  sinfo
}

stop() {
  local p f pid
  scancel -u root 2>/dev/null || true
  for p in $(echo "$PIDS" | tr ' ' '\n' | tac); do
    f=$BASE/run/$p.pid; alive "$p" || continue
    pid=$(cat "$f"); kill "$pid"
    for _ in $(seq 150); do kill -0 "$pid" 2>/dev/null || break; sleep 0.2; done
    ! kill -0 "$pid" 2>/dev/null || echo "slurm_cluster: $p ($pid) is still there" >&2
  done
}

status() { local p; for p in $PIDS; do alive "$p" && echo "$p $(cat "$BASE/run/$p.pid")" || echo "$p -"; done; sinfo 2>/dev/null; squeue 2>/dev/null; }

case "${1:-}" in
  install) ACCOUNTING=1; install ;;
  start) start "${2:-}" ;;
  stop) stop ;;
  wipe) stop; rm -rf "$BASE" ;;
  status) status ;;
  env) echo "export SLURM_CONF=$SLURM_CONF" ;;
  *) sed -n '2,7p' "$0" | sed 's/^# \?//'; exit 2 ;;
esac
