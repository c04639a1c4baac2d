#!/usr/bin/perl
# What sanoid itself makes of configurations: runs the init() of the sanoid given, as it is written
# there, on each directory and prints {directory: {section: settings}} or {directory: "fatal: ..."}.
#
# usage: sanoid_init.pl SANOID DEFAULTS DATASETS DIRECTORY...
# DATASETS is a file of dataset names, a line each, that are to exist.
use strict;
use warnings;
use Config::IniFiles;
use JSON::PP;

my ($sanoid, $defaults, $datasets, @directories) = @ARGV;
our %args;
our $MINIMUM_DEFAULTS_VERSION = 2;

open my $source, '<', $sanoid or die "$sanoid: $!";
my $text = do { local $/; <$source> };
$text =~ /^(sub init \{.*?^\} # end sub init)/ms or die "no init() in $sanoid";
my $init = $1;
$init =~ s/\$MINIMUM_DEFAULTS_VERSION/\$main::MINIMUM_DEFAULTS_VERSION/g;
$init =~ s/\$args\{/\$main::args{/g;

open my $list, '<', $datasets or die "$datasets: $!";
chomp(my @known = <$list>);

# In place of sanoid's, which asks a shell's `zfs list -Hr PATH` and drops the first line.
sub getchilddatasets {
    my ($path) = @_;
    return map { "$_\n" } @known[1 .. $#known] if $path eq '';
    return () if $path =~ /\s/;
    return map { "$_\n" } grep { index($_, "$path/") == 0 } @known;
}

eval "$init\n1;" or die $@;

my %answer;
for my $directory (@directories) {
    local $SIG{__WARN__} = sub { };
    my %config = eval { init("$directory/sanoid.conf", $defaults) };
    if ($@) {
        my $reason = $@;
        chomp $reason;
        $answer{$directory} = "fatal: $reason";
        next;
    }
    for my $settings (values %config) {
        for my $key (keys %$settings) {
            my $value = $settings->{$key};
            $settings->{$key} = ref $value ? join("\n", @$value) : defined $value ? "$value" : "";
        }
        delete $settings->{initialized};
    }
    $answer{$directory} = \%config;
}
print JSON::PP->new->latin1->canonical->encode(\%answer);
